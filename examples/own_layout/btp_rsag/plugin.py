"""Registers the layout. Every boost command imports this module once the package is installed."""

from boost.config.layouts import register_layout
from btp_rsag.spec import RSAGSpec

register_layout(RSAGSpec())
