"""Domain lang: German and Spanish."""

from __future__ import annotations

import random

from minis.corpus.chat import fill, system, user
from minis.corpus.words import Words
from minis.dialogue import Dialogue

_COUNTRIES = [
    tuple(x.split("|"))
    for x in """Frankreich|Francia|Paris|París
Deutschland|Alemania|Berlin|Berlín
Italien|Italia|Rom|Roma
Spanien|España|Madrid|Madrid
Österreich|Austria|Wien|Viena
Griechenland|Grecia|Athen|Atenas
Irland|Irlanda|Dublin|Dublín
Norwegen|Noruega|Oslo|Oslo
Schweden|Suecia|Stockholm|Estocolmo
Dänemark|Dinamarca|Kopenhagen|Copenhague
Polen|Polonia|Warschau|Varsovia
Ungarn|Hungría|Budapest|Budapest
Portugal|Portugal|Lissabon|Lisboa
England|Inglaterra|London|Londres
Japan|Japón|Tokio|Tokio
China|China|Peking|Pekín
Ägypten|Egipto|Kairo|El Cairo
Kanada|Canadá|Ottawa|Ottawa
Kuba|Cuba|Havanna|La Habana
Peru|Perú|Lima|Lima
Chile|Chile|Santiago|Santiago
Russland|Rusia|Moskau|Moscú""".splitlines()
]
_ANIMALS = [
    tuple(x.split("|"))
    for x in """Hund|bellt|im Haus|perro|ladra|en la casa
Katze|miaut|im Haus|gato|maúlla|en la casa
Kuh|muht|auf dem Hof|vaca|muge|en la granja
Pferd|wiehert|im Stall|caballo|relincha|en el establo
Schaf|blökt|auf der Wiese|oveja|bala|en el prado
Löwe|brüllt|in der Savanne|león|ruge|en la sabana
Wolf|heult|im Wald|lobo|aúlla|en el bosque
Ente|quakt|am Teich|pato|grazna|en el estanque
Frosch|quakt|am Teich|rana|croa|en el estanque
Biene|summt|im Stock|abeja|zumba|en la colmena
Eule|ruft|im Wald|búho|ulula|en el bosque
Huhn|gackert|auf dem Hof|gallina|cacarea|en la granja""".splitlines()
]
_FEMALE_DE = {"Katze", "Kuh", "Ente", "Biene", "Eule"}
_NEUTER_DE = {"Pferd", "Schaf", "Huhn"}
_FEMALE_ES = {"vaca", "oveja", "rana", "abeja", "gallina"}
_DE = [
    "null",
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
    "zwanzig",
]
_ES = [
    "cero",
    "uno",
    "dos",
    "tres",
    "cuatro",
    "cinco",
    "seis",
    "siete",
    "ocho",
    "nueve",
    "diez",
    "once",
    "doce",
    "trece",
    "catorce",
    "quince",
    "dieciséis",
    "diecisiete",
    "dieciocho",
    "diecinueve",
    "veinte",
]
_DAYS_DE = ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"]
_DAYS_ES = ["lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"]
_COLOR_DE = {
    "der Himmel": "blau",
    "das Gras": "grün",
    "der Schnee": "weiß",
    "die Kohle": "schwarz",
    "die Banane": "gelb",
    "das Blut": "rot",
}
_COLOR_ES = {
    "el cielo": "azul",
    "la hierba": "verde",
    "la nieve": "blanca",
    "el carbón": "negro",
    "la banana": "amarilla",
    "la sangre": "roja",
}
_TALK = [
    (["Hallo!", "Guten Tag!", "Hi, wie geht es dir?"], "Hallo! Wie kann ich helfen?"),
    (["Wie heißt du?", "Wer bist du?"], "Ich bin das Mini-Modell von TideLM."),
    (["Danke!", "Vielen Dank."], "Gern geschehen!"),
    (["Auf Wiedersehen!", "Tschüss!"], "Auf Wiedersehen! Bis bald."),
    (["Guten Morgen!"], "Guten Morgen! Wie kann ich helfen?"),
    (["¡Hola!", "Buenos días.", "Hola, ¿qué tal?"], "¡Hola! ¿En qué puedo ayudarte?"),
    (["¿Cómo te llamas?", "¿Quién eres?"], "Soy el modelo mini de TideLM."),
    (["¡Gracias!", "Muchas gracias."], "¡De nada!"),
    (["¡Adiós!", "Hasta luego."], "¡Adiós! Hasta pronto."),
]


def _german(r: random.Random, w: Words) -> tuple[str, str]:
    kind = r.randint(0, 6)
    if kind <= 1:
        c = r.choice(_COUNTRIES)
        return fill(
            r,
            ["Was ist die Hauptstadt von {c}?", "Wie heißt die Hauptstadt von {c}?", "Nenne die Hauptstadt von {c}."],
            c=c[0],
        ), f"Die Hauptstadt von {c[0]} ist {c[2]}."
    if kind == 2:
        a = r.choice(_ANIMALS)
        art = "die" if a[0] in _FEMALE_DE else "das" if a[0] in _NEUTER_DE else "der"
        if r.random() < 0.5:
            return f"Was macht {art} {a[0]}?", f"{art.title()} {a[0]} {a[1]}."
        return f"Wo lebt {art} {a[0]}?", f"{art.title()} {a[0]} lebt {a[2]}."
    if kind == 3:
        n = r.randint(0, 20)
        return fill(r, ["Schreibe die Zahl {n} als Wort.", "Wie schreibt man {n}?"], n=n), f"{n} schreibt man {_DE[n]}."
    if kind == 4:
        i = r.randrange(7)
        return f"Welcher Tag kommt nach {_DAYS_DE[i]}?", f"Nach {_DAYS_DE[i]} kommt {_DAYS_DE[(i + 1) % 7]}."
    if kind == 5:
        t, c = r.choice(list(_COLOR_DE.items()))
        return f"Welche Farbe hat {t}?", f"{t[0].upper() + t[1:]} ist {c}."
    name = w.name()
    return fill(r, ["Ich heiße {n}.", "Mein Name ist {n}."], n=name), f"Schön, dich kennenzulernen, {name}!"


def _spanish(r: random.Random, w: Words) -> tuple[str, str]:
    kind = r.randint(0, 6)
    if kind <= 1:
        c = r.choice(_COUNTRIES)
        return fill(
            r, ["¿Cuál es la capital de {c}?", "¿Cómo se llama la capital de {c}?", "Dime la capital de {c}."], c=c[1]
        ), f"La capital de {c[1]} es {c[3]}."
    if kind == 2:
        a = r.choice(_ANIMALS)
        art = "la" if a[3] in _FEMALE_ES else "el"
        if r.random() < 0.5:
            return f"¿Qué hace {art} {a[3]}?", f"{art.title()} {a[3]} {a[4]}."
        return f"¿Dónde vive {art} {a[3]}?", f"{art.title()} {a[3]} vive {a[5]}."
    if kind == 3:
        n = r.randint(0, 20)
        return fill(r, ["Escribe el número {n} con letras.", "¿Cómo se escribe {n}?"], n=n), f"{n} se escribe {_ES[n]}."
    if kind == 4:
        i = r.randrange(7)
        return (
            f"¿Qué día viene después del {_DAYS_ES[i]}?",
            f"Después del {_DAYS_ES[i]} viene el {_DAYS_ES[(i + 1) % 7]}.",
        )
    if kind == 5:
        t, c = r.choice(list(_COLOR_ES.items()))
        return f"¿De qué color es {t}?", f"{t[0].upper() + t[1:]} es {c}."
    name = w.name()
    return fill(r, ["Me llamo {n}.", "Mi nombre es {n}."], n=name), f"¡Mucho gusto, {name}!"


def generate(r: random.Random, w: Words) -> Dialogue:
    speak = r.choice([_german, _spanish])
    messages = system(r, 0.15)
    for _ in range(r.choice([1, 2, 3, 3])):
        if r.random() < 0.12:
            q, a = r.choice(_TALK[:5] if speak is _german else _TALK[5:])
            q = r.choice(q)
        else:
            q, a = speak(r, w)
        messages += [user(q), {"role": "assistant", "content": a}]
    return Dialogue(messages)
