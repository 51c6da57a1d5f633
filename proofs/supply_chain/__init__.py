"""Packages that the gate installs: lock files with hashes, licences, and a software bill of materials (SBOM)."""
