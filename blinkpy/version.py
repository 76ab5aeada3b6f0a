"""The version of the package, for modules that must not import the rest."""

__version__ = "0.2.0"
