"""Send hints between programs: `celery_app`, and the `task_names` by which they call each other.

The proxy hints to the judge that feedback came, the judge to the trainer that groups are scored. A lost hint costs time
only: each worker also looks by itself.
"""
