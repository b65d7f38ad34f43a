"""Send tasks between programs: `celery_app` and `task_names`."""
