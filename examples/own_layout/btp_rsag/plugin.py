"""What every boost command imports once this package is installed."""

from boost.layouts import register_layout
from btp_rsag.spec import RSAGSpec

register_layout(RSAGSpec())
