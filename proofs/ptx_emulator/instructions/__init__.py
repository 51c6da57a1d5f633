"""PTX instructions by family: each module maps opcodes to builders that turn an instruction into a closure."""
