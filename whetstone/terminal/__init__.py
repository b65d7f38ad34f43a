"""Write to a terminal: `progress` while something takes long, tables that `fitting` makes as wide as the screen, lists
of objects that `listing` shows in a row each.
"""
