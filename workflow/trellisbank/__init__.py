# SPDX-License-Identifier: Apache-2.0
"""Re-encode the routed experts of a mixture-of-experts checkpoint as EXL3 trellis weights."""

__version__ = "0.1.0"
