"""The trainer's SQL: `unit_of_work` joins one module for each subject."""
