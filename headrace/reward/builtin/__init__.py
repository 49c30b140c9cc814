"""Rewards that read the last answer: right by a column of the task's row, or by a form that is configured.

Each is a function of the text and the task's data. Standard library only, but for math-verify and jsonschema.

- `answers`: finds the answer in a text: boxed, after ####, in answer tags, or after "the answer is".
- `final_number`: the reward "final_number", and the numbers in a text.
- `math_answer`: the reward "math", mathematical equality by math-verify.
- `choice`: the reward "choice", a letter or the text of an option.
- `code_tests`: the reward "code", programs run against tests or cases.
- `json_schema`: the reward "json_schema", JSON that fits a schema.
- `pattern`: the reward "regex", a pattern that is found, or whose group is the expected text.
- `final_answer`: the answer of an episode, for a vote among samples; no reward.
- `table`: all of them by name: their options, the columns that they read, and the checks of both before a run.
"""
