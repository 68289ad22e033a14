"""The version of the package: its one source, read by the build as well."""

__version__ = "0.1.0"
