# SPDX-License-Identifier: Apache-2.0
"""The model's text forward pass, one layer at a time, on weights as they are stored."""
