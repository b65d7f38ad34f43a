"""The dashboard at /ui: pages made on the server. Reads the tables, acts by the same code as the admin routes."""
