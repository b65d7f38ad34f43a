"""Keep adapter folders: `files` writes and reads them, `retention` removes old folders.

`published` does both in an adapter store, where machines do not see one another's folders.
"""
