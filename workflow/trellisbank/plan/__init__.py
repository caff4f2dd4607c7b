# SPDX-License-Identifier: Apache-2.0
"""Which rate every slot of a serving layout gets, frozen and hashed before it is used."""
