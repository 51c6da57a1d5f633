"""A corpus of real English text in the shape of FineWeb-Edu, made from Debian's documentation packages."""

from nsa.data.demo.build import DemoCorpus, Progress, build_demo

__all__ = ["DemoCorpus", "Progress", "build_demo"]
