"""The harnesses that ship with the core. Each module is one; nothing here knows of training or grading."""
