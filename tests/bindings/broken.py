"""Python that breaks the grader of the installed verify_gym before a command of the framework starts."""

FALSE = "import verify_gym.answer as answer\nanswer._word = lambda side, wanted: 'CERTIFIED'\n"
RAISING = "import verify_gym.rewards as rewards\nrewards.grade = lambda *words, **more: 1 // 0\n"
FALSE_AFTER_THE_GATE = "import verify_gym.rewards as rewards\nrewards.open_gate()\n" + FALSE
