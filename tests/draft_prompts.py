"""Prompts for `train_draft_layer.py`: of some kinds by the thousand, and a few to measure with.

The held-out ones are written by hand, and their subjects are none of those the others are about.
"""

import random

#: Prompts of these forms are about each of `SUBJECTS`.
FORMS = """
What is {}?
Explain {} to a child.
Explain {} in simple words.
Give me a short introduction to {}.
Tell me about {}.
Write a short story about {}.
Write a poem about {}.
Write a paragraph about {}.
List five interesting facts about {}.
What are the most important things to know about {}?
What are the advantages and disadvantages of {}?
Why is {} important?
How can I learn more about {}?
Write a short dialogue between two friends about {}.
What are common misconceptions about {}?
Give me three tips about {}.
Write an email to a colleague about {}.
What is the history of {}?
How would you describe {} to someone who has never heard of it?
Make a step-by-step plan for a beginner who is interested in {}.
Summarize what you know about {} in three sentences.
Write a short news article about {}.
What questions should I ask an expert about {}?
Write a product description for something that has to do with {}.
Can you give me some examples of {}?
Write a slogan for a campaign about {}.
I have to give a talk on {}. What should I say?
What does {} have to do with everyday life?
Compare {} with something similar.
Write a blog post about {}.
What are the main parts of {}?
How does {} work?
Write a riddle about {}.
Make a list of ten words that have to do with {}.
What could go wrong with {}, and how can it be avoided?
Please write a letter to a friend who asks about {}.
"""

SUBJECTS = """
the human heart|volcanoes|the stock market|gardening|the French Revolution|electric cars|chess
black holes|bread baking|time management|photosynthesis|the Great Wall of China|jazz music|yoga
renewable energy|dogs|cats|the solar system|machine learning|databases|public speaking|vaccines
healthy food|the water cycle|ancient Egypt|football|basketball|mountain climbing|sleep|dreams
climate change|space travel|the internet|mobile phones|social media|reading books|cooking pasta
a lonely robot|a lost key|a talking tree|a brave mouse|a dragon who is afraid of fire|winter
summer holidays|learning a language|playing the guitar|painting|photography|cheese|coffee|tea
job interviews|saving money|paying taxes|insurance|banks|inflation|democracy|human rights
the Roman Empire|the Second World War|Leonardo da Vinci|Albert Einstein|Marie Curie|Shakespeare
gravity|electricity|magnets|atoms|DNA|evolution|bacteria|the immune system|the human brain
dinosaurs|whales|bees|butterflies|sharks|elephants|horses|birds|forests|deserts|oceans|rivers
Japan|Brazil|Canada|India|Australia|Italy|Kenya|New York|Paris|London|the Amazon rainforest
Python programming|web design|computer security|algorithms|binary numbers|recursion|Linux|robots
fractions|prime numbers|triangles|probability|statistics|calculus|the number pi|algebra
friendship|happiness|honesty|courage|stress|anxiety|meditation|exercise|running|swimming|cycling
schools|teachers|homework|exams|universities|small businesses|marketing|leadership|teamwork
architecture|bridges|trains|airplanes|ships|bicycles|recycling|plastic|water pollution|farming
movies|video games|theater|museums|fashion|birthdays|weddings|moving to a new city|pets
"""

#: Prompts about numbers and code, with blanks for a larger and a smaller number.
DRILLS = """
What is {0} plus {1}?
What is {0} times {1}?
What is {1} percent of {0}?
If I have {0} apples and give away {1}, how many are left?
A train goes {0} km in {1} hours. How fast is it?
Write a Python function that returns the {1} largest numbers of a list.
Write a Python function that checks whether a number can be divided by {1}.
Write a Python program that prints the numbers from {1} to {0}.
Write a function in JavaScript that adds {1} to every element of an array.
Write an SQL query that finds the {1} customers who spent more than {0} dollars.
Make a packing list for a trip of {1} days.
Make a shopping list for {1} people and {0} dollars.
Plan a workout of {0} minutes.
Suggest {1} names for a new company.
Suggest {1} books that I could read in {0} days.
Count from {1} to {0}.
"""

#: Never trained on.
HELD_OUT = (
    "What is the capital of Portugal, and what is it known for?",
    "Write a haiku about the moon.",
    "How do I boil an egg?",
    "Explain how a refrigerator keeps food cold.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me five ideas for a cheap dinner with potatoes.",
    "What is the difference between a virus and a worm in computing?",
    "Translate 'Good morning, how are you?' into Spanish.",
    "Write a Python function that reverses a string.",
    "Who was Nelson Mandela?",
    "How can I fall asleep faster?",
    "What are the rules of tennis?",
    "Write a polite email asking my landlord to fix the heating.",
    "Name the planets in order of their distance from the Sun.",
    "How do airplanes fly, in one paragraph?",
    "What should I pack for a weekend of camping?",
    "Explain what an API is to a grandmother.",
    "Give me a recipe for pancakes.",
    "What is the meaning of the proverb 'A stitch in time saves nine'?",
    "How many legs do three spiders have together?",
    "Write a birthday message for my brother who turns thirty.",
    "What happened to the Titanic?",
    "Is it better to rent or to buy a house?",
    "Write a limerick about a penguin.",
    "How do I remove a coffee stain from a shirt?",
    "Sort these words alphabetically: pear, apple, orange, banana.",
    "What does HTTP stand for and how does it work?",
)


def written_prompts(seed: int) -> list[str]:
    """All forms of prompts about all subjects, and the drills with some numbers, shuffled."""
    draw = random.Random(seed)
    subjects = SUBJECTS.strip().replace("\n", "|").split("|")
    forms, drills = (text.strip().splitlines() for text in (FORMS, DRILLS))
    prompts = [form.format(subject) for form in forms for subject in subjects]
    prompts += [drill.format(draw.randint(10, 200), n) for drill in drills for n in range(2, 10)]
    draw.shuffle(prompts)
    return prompts
