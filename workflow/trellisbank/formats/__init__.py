# SPDX-License-Identifier: Apache-2.0
"""Stored number formats: exact readers, and exact inverses where the format allows one."""
