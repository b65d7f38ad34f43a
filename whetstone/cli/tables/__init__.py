"""What commands read, change and print: queries, moves of versions, tables."""
