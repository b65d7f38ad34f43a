"""All pages and actions of the dashboard, and the navigation. Each of the other modules defines its own."""

from proxy.dashboard.interfaces import Action, Page
from proxy.dashboard.pages import (
    feedback,
    funnel,
    groups,
    keys,
    policies,
    reviews,
    search,
    steps,
    trajectories,
)

MODULES = (
    *(policies, steps, groups, search, trajectories),
    *(funnel, feedback, reviews, keys),
)
PAGES: tuple[Page, ...] = tuple(page for module in MODULES for page in module.PAGES)
ACTIONS: tuple[Action, ...] = tuple(action for module in MODULES for action in module.ACTIONS)

_LABELS = (
    ("Policies", "/ui/policies"),
    ("Groups", "/ui/groups"),
    ("Trajectories", "/ui/trajectories"),
    ("Why not trained", "/ui/funnel"),
    ("Feedback", "/ui/feedback"),
    ("Reviews", "/ui/reviews"),
    ("Keys and costs", "/ui/keys"),
)
_PATHS = {page.path for page in PAGES}
NAV: tuple[tuple[str, str], ...] = tuple(label for label in _LABELS if label[1] in _PATHS)
"""Links in the navigation: label and path."""
