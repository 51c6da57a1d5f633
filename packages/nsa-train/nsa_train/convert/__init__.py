"""Models in folders: export to Transformers and import, conversion of dense models (`dense`)."""
