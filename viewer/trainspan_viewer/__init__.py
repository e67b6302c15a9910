"""`trainspan view`: pages about runs, datasets, groups and rollouts, in a browser or as files. It sends only labels.

- `server/`: the web server: routes, security headers, checks of host and origin.
- `pages/`: one page each, a pure function from a model to elements.
- `queries/`: the models of the pages, read from stores, run folders and datasets.
- `html/`: elements, charts, and whole documents.
- `static/`: the style sheet and the one script of the server's pages.
"""
