"""The version of the package, for those who must not import it whole."""

__version__ = "0.2.0"
