"""Graders: judges in the JSON format of OpenAI's reinforcement fine-tuning.

`grader_file` reads and checks a file, `templates` and `formula` are its small languages, and `grading` gives the verdicts.
"""
