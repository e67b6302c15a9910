"""One module per format: how a file of it is recognized, and what its records become. `catalog` lists them."""
