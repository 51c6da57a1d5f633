"""What runs on the GPU. The modules beside this package launch it."""
