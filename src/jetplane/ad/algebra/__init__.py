"""What a jet is: rows and pair sets, the families that rules are made by, and the table of rules."""
