"""Demo corpus (`nsa data demo`): English text from Debian's documentation packages, in the format of FineWeb-Edu."""

from nsa_train.data.demo.build import DemoCorpus, Progress, build_demo

__all__ = ["DemoCorpus", "Progress", "build_demo"]
