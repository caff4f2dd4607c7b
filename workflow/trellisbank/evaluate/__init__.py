# SPDX-License-Identifier: Apache-2.0
"""What a release lost against its source, a token at a time, and how sure that is."""
