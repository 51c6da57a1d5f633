"""Models of other software as models of ours and back (`nsa convert`).

- `source_families`: config.json of the architectures that are read, as a `source_model`;
- `source_folder`: their tensors by our names, read and checked;
- `conversion_plan`, `convert_folder`: options, the converted folder, and the way back.
"""
