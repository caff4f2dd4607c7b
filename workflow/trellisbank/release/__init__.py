# SPDX-License-Identifier: Apache-2.0
"""Servable checkpoints made from a source, a bank and a frozen plan, and their verification."""
