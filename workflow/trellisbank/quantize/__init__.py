# SPDX-License-Identifier: Apache-2.0
"""Encoding of experts as EXL3: Hessians, error feedback, tile search, and one expert's matrices."""
