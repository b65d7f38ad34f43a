"""The dashboard's SQL, one module for each subject. Reads only, but for `sessions`."""
