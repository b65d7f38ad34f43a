"""What commands read and print: queries, tables, reports."""
