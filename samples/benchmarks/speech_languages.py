"""Word error rates of speech in each language, as a multilingual recognizer hears it.

    python samples/benchmarks/speech_languages.py --model kokoro-82m --recognizer whisper-base

Eight sentences of each language are spoken in its first voice and transcribed. Words that are
written differently are compared by their sounds in Japanese and Mandarin: the recognizer chooses
among kana, kanji, and simplified or traditional characters. It errs, too.
"""

# ruff: noqa: RUF001  # sentences of many scripts
from __future__ import annotations

import argparse
import time
import unicodedata
from collections.abc import Mapping, Sequence

from triptych import SpeechPipeline, TranscriptionPipeline
from triptych.core.errors import UnsupportedOption
from triptych.modalities.asr.api.pipeline import resample
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.phonemes import Phonemizer
from triptych.modalities.tts.api.text.spoken import SpokenText
from triptych.modalities.tts.api.text.tongues import Reading, reading_of

SENTENCES: Mapping[str, tuple[str, str]] = {
    "en-GB": (
        "bf_emma",
        "Good morning, my name is Claire and I live in a small house near the sea."
        "|The train leaves at eight and arrives in London in the afternoon."
        "|Tomorrow we are going to buy bread, cheese and fruit at the market."
        "|It rained a lot last week and the river rose by two metres."
        "|My brother studies medicine at the university."
        "|Can you close the window? It is cold in this room."
        "|The children play in the garden while their grandmother prepares dinner."
        "|This book tells the story of a journey through the desert.",
    ),
    "es": (
        "ef_dora",
        "Buenos días, me llamo Carmen y vivo en una casa pequeña cerca del mar."
        "|El tren sale a las ocho y llega a Madrid después del mediodía."
        "|Mañana vamos a comprar pan, queso y fruta en el mercado."
        "|La semana pasada llovió mucho y el río creció dos metros."
        "|Mi hermano estudia medicina en la universidad de Sevilla."
        "|¿Puedes cerrar la ventana? Hace frío en esta habitación."
        "|Los niños juegan en el jardín mientras su abuela prepara la cena."
        "|Este libro cuenta la historia de un viaje por el desierto.",
    ),
    "fr": (
        "ff_siwis",
        "Bonjour, je m'appelle Claire et j'habite une petite maison près de la mer."
        "|Le train part à huit heures et arrive à Paris après midi."
        "|Demain nous allons acheter du pain, du fromage et des fruits au marché."
        "|La semaine dernière il a beaucoup plu et la rivière a monté."
        "|Mon frère étudie la médecine à l'université de Lyon."
        "|Peux-tu fermer la fenêtre ? Il fait froid dans cette chambre."
        "|Les enfants jouent dans le jardin pendant que leur grand-mère prépare le dîner."
        "|Ce livre raconte l'histoire d'un voyage dans le désert.",
    ),
    "hi": (
        "hf_alpha",
        "नमस्ते, मेरा नाम राम है और मैं एक छोटे घर में रहता हूँ।"
        "|कल हम बाज़ार से रोटी, दूध और फल खरीदेंगे।"
        "|पिछले हफ़्ते बहुत बारिश हुई और नदी में पानी बढ़ गया।"
        "|मेरा भाई दिल्ली में पढ़ता है।"
        "|क्या आप खिड़की बंद कर सकते हैं? यहाँ बहुत ठंड है।"
        "|बच्चे बगीचे में खेल रहे हैं और दादी खाना बना रही हैं।"
        "|यह किताब एक लंबी यात्रा की कहानी है।"
        "|रेलगाड़ी सुबह आठ बजे चलती है।",
    ),
    "it": (
        "if_sara",
        "Buongiorno, mi chiamo Laura e abito in una piccola casa vicino al mare."
        "|Il treno parte alle otto e arriva a Milano nel pomeriggio."
        "|Domani andiamo al mercato a comprare pane, formaggio e frutta."
        "|La settimana scorsa ha piovuto molto e il fiume è cresciuto."
        "|Mio fratello studia medicina all'università di Bologna."
        "|Puoi chiudere la finestra? Fa freddo in questa stanza."
        "|I bambini giocano nel giardino mentre la nonna prepara la cena."
        "|Questo libro racconta la storia di un viaggio nel deserto.",
    ),
    "ja": (
        "jf_alpha",
        "おはようございます。私は海の近くの小さな家に住んでいます。"
        "|電車は朝八時に出て、午後に東京に着きます。"
        "|明日は市場でパンと果物を買います。"
        "|先週は雨がたくさん降りました。"
        "|兄は大学で医学を勉強しています。"
        "|窓を閉めてください。この部屋は寒いです。"
        "|子供たちは庭で遊んでいます。"
        "|この本は長い旅の話です。",
    ),
    "pt-BR": (
        "pf_dora",
        "Bom dia, meu nome é Ana e moro em uma casa pequena perto do mar."
        "|O trem sai às oito horas e chega a São Paulo depois do almoço."
        "|Amanhã vamos comprar pão, queijo e frutas no mercado."
        "|Na semana passada choveu muito e o rio subiu dois metros."
        "|Meu irmão estuda medicina na universidade do Rio de Janeiro."
        "|Você pode fechar a janela? Está frio neste quarto."
        "|As crianças brincam no jardim enquanto a avó prepara o jantar."
        "|Este livro conta a história de uma viagem pelo deserto.",
    ),
    "zh": (
        "zf_xiaobei",
        "早上好，我住在海边的一个小房子里。"
        "|火车早上八点出发，下午到北京。"
        "|明天我们去市场买面包和水果。"
        "|上个星期下了很多雨。"
        "|我哥哥在大学学习医学。"
        "|请把窗户关上，这个房间很冷。"
        "|孩子们在花园里玩，奶奶在做晚饭。"
        "|这本书讲了一个旅行的故事。",
    ),
}
_UNSPACED = ("ja", "zh")
PHONEMIZER = Phonemizer()


def units(text: SpokenText, reading: Reading) -> list[str]:
    """The words of a text in plain letters, or its phonemes in a script without spaces."""
    if reading in _UNSPACED:
        return [symbol for symbol in str(PHONEMIZER(text, reading)) if symbol.isalpha()]
    plain = unicodedata.normalize("NFKC", text.text).lower().replace("'", " ")
    return "".join(char if unicodedata.category(char)[0] in "LM" else " " for char in plain).split()


def num_edits(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest insertions, deletions and substitutions between two sequences."""
    row = list(range(len(heard) + 1))
    for at, unit in enumerate(said, 1):
        before, row[0] = row[0], at
        for index, other in enumerate(heard, 1):
            cost = min(before + (unit != other), row[index] + 1, row[index - 1] + 1)
            before, row[index] = row[index], cost
    return row[-1]


def main() -> None:
    """Speak, transcribe, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="kokoro-82m")
    parser.add_argument("--recognizer", default="whisper-base")
    parser.add_argument("--languages", nargs="*", default=list(SENTENCES))
    parser.add_argument("--print", action="store_true", help="print each transcript that differs")
    args = parser.parse_args()
    with (
        SpeechPipeline.from_pretrained(args.model, progress=False) as speak,
        TranscriptionPipeline.from_pretrained(args.recognizer, progress=False) as hear,
    ):
        for language in args.languages:
            voice, text = SENTENCES[language]
            primary = language.partition("-")[0]
            reading = reading_of(language)
            assert reading is not None, "a language of the table"
            in_words = Normalizer(NormalizeOptions(dialect=reading))
            num_wrong = num_units = 0
            sound_s, started_s = 0.0, time.monotonic()
            for sentence in text.split("|"):
                try:
                    speech = speak(sentence, voice=voice, seed=1)
                except UnsupportedOption as error:
                    print(f"{language}: {error}")
                    break
                sound_s += speech.duration_s
                sound_S = resample(speech.audio, speech.sample_rate)
                heard = hear(sound_S, language=primary, temperature=0.0).text
                pair = [units(in_words(each), reading) for each in (sentence, heard)]
                num_wrong, num_units = num_wrong + num_edits(*pair), num_units + len(pair[0])
                if args.print and pair[0] != pair[1]:
                    print(f"  {sentence}\n  {heard.strip()}")
            else:
                print(
                    f"{language} ({voice}): {num_wrong} of {num_units}"
                    f" {'phonemes' if reading in _UNSPACED else 'words'} wrong"
                    f" ({num_wrong / num_units:.1%}), {sound_s:.0f} s of speech"
                    f" in {time.monotonic() - started_s:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
