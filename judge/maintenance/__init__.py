"""Keep the tables small (`retention`) and the dashboards fast (`rollups`)."""
