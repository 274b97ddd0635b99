"""The paper's figures and tables, each resumable, with its data as CSV and JSON and a plot."""
