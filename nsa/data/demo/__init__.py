"""A corpus of real English text in the shape of FineWeb-Edu, made from Debian's documentation packages."""

from nsa.data.demo.build import Built, Progress, build_demo

__all__ = ["Built", "Progress", "build_demo"]
