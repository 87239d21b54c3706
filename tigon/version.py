"""The version of Tigon: of the package, of `tigon --version`, and compared between ranks."""

__version__ = "0.1.0"
