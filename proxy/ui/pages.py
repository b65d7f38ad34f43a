"""All pages and actions of the dashboard, and the navigation. Each `pages_*` module has its own."""

from proxy.ui import (
    pages_feedback,
    pages_funnel,
    pages_groups,
    pages_keys,
    pages_policies,
    pages_reviews,
    pages_search,
    pages_steps,
    pages_trajectories,
)
from proxy.ui.page import Action, Page

MODULES = (
    *(pages_policies, pages_steps, pages_groups, pages_search, pages_trajectories),
    *(pages_funnel, pages_feedback, pages_reviews, pages_keys),
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
"""What each page links to: words and path."""
