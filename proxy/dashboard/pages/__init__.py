"""One module for each page: what it reads, what it shows, what can be done there. `registry` lists them all."""
