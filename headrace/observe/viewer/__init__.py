"""`headrace view`: look at rollout files.

- `query`: answer a query with tables, or write one page.
- `catalog`: list the episodes of a file in two passes.
- `anchors`, `graph`: anchor states of a group, and their graph.
- `tokens`: tokens with their figures and colours.
- `terminal`: tables for a terminal.
- `page`: one self-contained HTML page.
- `recredit_tables`: compare credit before and after.
- `task_text`: the question and the expected answer of a task, and tool calls as text.
- `safe_text`: escape text for terminals.
"""
