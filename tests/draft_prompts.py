"""Prompts for `train_draft_layer.py`: of some kinds by the thousand, and a few to measure with.

The held-out ones are written by hand, and none of them is among the others. Some have a form of
others, and a few are near their subjects (sleep, airplanes).
"""

import random
from collections.abc import Sequence

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

#: Other prompts, as people write them: each of some forms with each of what may stand in it.
KINDS = """
How do I {}?
What is the easiest way to {}?
I want to {}. Give me a few tips.
I have never tried to {}. Where do I start?
What do I need to {}?
How long does it take to {}?
clean a window|change a flat tire|iron a shirt|sharpen a kitchen knife|grow tomatoes on a balcony
wrap a present|get rid of ants|unclog a sink|train a puppy|wash a wool sweater|tie a tie
hang a picture|paint a wall|make my bedroom darker|stop biting my nails|wake up earlier
remember names|write a resume|ask for a raise|prepare for an exam|make new friends
learn to whistle|start a podcast|build a birdhouse|clean a keyboard|save battery on my phone
choose a good password|speed up an old laptop|back up my photos|cook rice|peel garlic quickly
keep bread fresh|store fresh herbs|plan a birthday party|move a piano|travel with a baby
read more books|take better photos at night|stay focused while studying|calm a crying child
run my first ten kilometers|improve my handwriting|write a thank-you note|fix a dripping tap
return a package|open a bank account|split a bill fairly|say no to a friend|apologize to my sister
find a cheap flight|pick a ripe melon|dry wet shoes|remove chewing gum from a carpet

What is the capital of {}?
Which language do people speak in {}?
What should I see in {}?
What is the weather like in {}?
Name a famous dish from {}.
Plan a trip of three days to {}.
France|Norway|Egypt|Peru|Vietnam|Greece|Poland|Mexico|Turkey|Argentina|Ireland|Morocco|Thailand
Finland|Hungary|Chile|Nigeria|Austria|Cuba|Iceland|South Korea|New Zealand|Switzerland|Jordan

Who was {}?
Write a short biography of {}.
What would {} say about our time?
What is {} famous for?
When did {} live?
Invent an interview with {}.
Isaac Newton|Cleopatra|Abraham Lincoln|Frida Kahlo|Mahatma Gandhi|Ludwig van Beethoven|Galileo
Florence Nightingale|Charles Darwin|Rosa Parks|Napoleon|Aristotle|Jane Austen|Nikola Tesla
Martin Luther King|Vincent van Gogh|Queen Victoria|Ada Lovelace|Julius Caesar|Anne Frank
Mozart|Joan of Arc|Marco Polo|Amelia Earhart|Mark Twain|Confucius|Pablo Picasso|Alan Turing

Give me a recipe for {}.
How do you make {}?
What can I serve with {}?
Is {} healthy?
Which ingredients do I need for {}?
Suggest a menu that begins with {}.
tomato soup|banana bread|fried rice|chocolate cake|an omelette|lentil curry|apple pie|tacos
vegetable lasagna|hummus|lemonade|scrambled eggs|chicken soup|pizza dough|oatmeal cookies
mashed carrots|guacamole|a Greek salad|roast chicken|mushroom risotto|waffles|chili|fish cakes

Write a Python function that {}.
How would you write a program that {}?
Write a function in Java that {}, and explain it.
adds up the numbers of a list|counts the vowels of a word|finds the largest number of a list
checks whether a word is a palindrome|removes duplicates from a list|sorts a list of names
converts Celsius to Fahrenheit|computes a factorial|merges two dictionaries|reads a text file
counts how often each word occurs|finds the second largest number|splits a list into halves
checks whether a year is a leap year|rolls two dice|turns a number into binary digits
finds all even numbers of a list|joins words with commas|validates an email address
computes the average of some grades|prints a multiplication table|shuffles a deck of cards

What is the difference between {}?
Which would you choose, and why: {}?
Compare {}.
a crocodile and an alligator|jam and jelly|weather and climate|a lake and a pond|a list and a tuple
a comet and an asteroid|butter and margarine|a novel and a novella|TCP and UDP|a moth and a bee
baking powder and baking soda|a city and a town|an atom and a molecule|a debit and a credit card
mass and weight|a rabbit and a hare|empathy and sympathy|a compiler and an interpreter
a simile and a metaphor|a loan and a mortgage|speed and velocity|RAM and a hard disk|wine and beer
a turtle and a tortoise|a symphony and a concerto|a law and a theory|rain and hail|oil and gas

Write a polite email {}.
Write a short message {}.
What should I not forget in a letter {}?
asking for a day off|inviting my neighbors to a barbecue|thanking a teacher
asking a shop to take back a broken toaster|canceling a gym membership|declining a job offer
reminding a client of an unpaid invoice|asking for a letter of recommendation
congratulating a friend on a new baby|apologizing for being late to a meeting
asking a hotel for a quieter room|wishing my grandmother a happy birthday
introducing myself to a new team|asking a professor for more time|saying goodbye to colleagues
complaining about a delayed train|asking the city to repair a street light

Translate '{}' into French.
Translate '{}' into German.
How do you say '{}' more formally?
Where is the train station?|I would like a cup of tea.|What time is it?|My name is Anna.
Thank you very much for your help.|How much does this cost?|I am learning to cook.
The weather is nice today.|Can you help me, please?|See you tomorrow!|I am hungry.

Why {}?
My daughter asks: why {}?
In one sentence: why {}?
do leaves change color in autumn|is the sea salty|do cats purr|do we yawn|is ice slippery
do onions make us cry|do we have leap years|do birds migrate|do rainbows have colors|do we dream
does bread rise|do stars twinkle|does metal feel cold|do people snore|do dogs wag their tails
is glass transparent|do we need sleep|does hot air rise|are flamingos pink|do bees make honey
do our ears pop in an elevator|is Pluto not a planet|do we get goosebumps|does popcorn pop

What does the proverb '{}' mean?
Write a very short story that ends with '{}'.
The early bird catches the worm|Actions speak louder than words|Too many cooks spoil the broth
Don't count your chickens before they hatch|All that glitters is not gold|Better late than never
When in Rome, do as the Romans do|A picture is worth a thousand words|Practice makes perfect
Don't put all your eggs in one basket|The pen is mightier than the sword|Birds of a feather
Rome was not built in a day|Look before you leap|Honesty is the best policy|Time is money

What does {} stand for?
What does {} mean, and where is it used?
Explain {} briefly.
NASA|CPU|DNA|GPS|PDF|USB|FAQ|ATM|UFO|LED|SQL|HTML|VPN|RSVP|CEO|GDP|URL|DIY|WHO|UNESCO|BMI|JPEG

Write a short story about {}.
Write a haiku about {}.
Write a limerick about {}.
Write a song about {}.
Give me a title and a first sentence for a novel about {}.
a clock that runs backwards|a girl who can talk to trees|a train that never stops|an old violin
two rivals who must share a tent|a cat who becomes mayor|the last bookshop in town|a snowman
a baker with a secret|a letter that arrives fifty years late|a dog at sea|a shy giant
a detective who is afraid of the dark|autumn leaves|a rainy Monday|an island that moves|a frog
a painter who sees only two colors|a village without music|the sea at night|a broken umbrella

Give me five ideas for {}.
Make a short list for {}.
What would you suggest for {}?
Please help me to plan {}.
How much money do I need for {}?
a rainy afternoon|a gift for my father|a healthy breakfast|a school science project|team building
a picnic|a small garden|a costume party|a weekend in the mountains|a family game night
quick lunches at work|a first date|decorating a small apartment|a fundraiser|a summer camp
using up old bread|a blog about travel|spending less time online|a surprise for my wife|new habits

What are the rules of {}?
Teach me {}.
Who invented {}?
How can I get better at {}?
checkers|volleyball|poker|table tennis|cricket|baseball|hide and seek|golf|badminton|dominoes
ice hockey|rugby|Monopoly|Scrabble|darts|bowling|tic-tac-toe|water polo|handball|Sudoku

How does {} work?
Explain how {} works to a ten-year-old.
What is {} made of?
How do I clean {}?
Who invented {}, and when?
Describe {} in two sentences.
a microwave oven|a bicycle brake|a vacuum cleaner|a solar panel|a camera|a zipper|a battery
a washing machine|an elevator|a thermometer|a toaster|a ballpoint pen|a touch screen|a telescope
a light bulb|a compass|a parachute|a traffic light|a printer|a submarine|a piano|a lock|a dam

When was {}, and why does it matter?
What happened after {}?
Tell me more about {}.
What led to {}?
Summarize {} in three sentences.
the first moon landing|the fall of the Berlin Wall|the invention of the printing press
the sinking of the Lusitania|the American Civil War|the Black Death|the first Olympic Games
the discovery of penicillin|the Boston Tea Party|the eruption of Vesuvius|the Gold Rush
the opening of the Suez Canal|the Great Depression|the Chernobyl disaster|the first World Cup

Is it better to {}?
My friends disagree: is it wiser to {}?
Would you rather {}?
work at home or in an office|learn the piano or the guitar|travel by train or by plane
take a shower or a bath|exercise in the morning or in the evening|live in a city or in a village
write by hand or on a computer|read on paper or on a screen|have a cat or a dog
lease or buy a car|study alone or in a group|drink coffee or tea|cook at home or eat out

{}
{} Please explain your answer.
How many legs do four cats have together?|How many wheels do six cars have?|What is half of 86?
What is the square root of 144?|If today is Tuesday, what day is it in ten days?|What is 15% of 60?
A book costs 12 dollars. How much do five books cost?|How many minutes are in three hours?
Sort these numbers: 17, 4, 23, 9, 12.|Sort these words alphabetically: lion, tiger, bear, wolf.
Sort these cities alphabetically: Rome, Berlin, Oslo, Madrid.|Name the continents.|Name the oceans.
Name the months that have 31 days.|Name the colors of the rainbow in order.|Name five large rivers.
Which word does not belong here: apple, carrot, banana, cherry?|Spell the word 'necessary'.
What is the opposite of 'generous'?|What rhymes with 'light'?|Use the word 'curious' in a sentence.
What is the plural of 'mouse'?|Correct this sentence: He go to school yesterday.|What is a noun?
Rewrite this in the passive: The chef cooked a meal.|Which is larger, three quarters or two thirds?
What is the longest river in the world?|What is the highest mountain in Africa?|Who wrote Hamlet?
What is the boiling point of water?|How many bones does an adult have?|How old is the universe?
What is the chemical symbol of gold?|Which planet is the hottest?|How far away is the Moon?
Hello!|Good evening, who are you?|What can you do for me?|Tell me a joke.|I feel a bit sad today.
I am bored.|Can you recommend a movie?|What is your favorite color?|Tell me something surprising.
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


def subject_prompts(seed: int) -> list[str]:
    """All forms of prompts about all subjects, and the drills with some numbers, shuffled."""
    draw = random.Random(seed)
    forms, drills = FORMS.strip().splitlines(), DRILLS.strip().splitlines()
    prompts = _filled(forms, SUBJECTS)
    prompts += [drill.format(draw.randint(10, 200), n) for drill in drills for n in range(2, 10)]
    draw.shuffle(prompts)
    return prompts


def other_prompts(seed: int) -> list[str]:
    """All of `KINDS`, shuffled."""
    prompts = []
    for kind in KINDS.strip().split("\n\n"):
        lines = kind.splitlines()
        forms = [line for line in lines if "{}" in line]
        prompts += _filled(forms, "|".join(lines[len(forms) :]))
    random.Random(seed).shuffle(prompts)
    return prompts


def _filled(forms: Sequence[str], blanks: str) -> list[str]:
    filled = blanks.strip().replace("\n", "|").split("|")
    return [form.format(blank) for form in forms for blank in filled]
