"""`nsa data`: make a demo corpus and train a tokenizer."""

import typer

data_app = typer.Typer(help="Build, prepare and check training data.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Make tokenizers.", no_args_is_help=True)
data_app.add_typer(tokenizer_app, name="tokenizer")
