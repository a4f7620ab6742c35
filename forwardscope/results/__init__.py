"""The results of calls, as frozen dataclasses. Arrays are numpy arrays in a client, and tensors in `load`'s model.

Each class is also the only description of an answer of the HTTP API: see records.py.
"""

from forwardscope.results.attributions import Attribution, HeadShare, SweepCell
from forwardscope.results.chats import ChatAnswer, ChatEvent
from forwardscope.results.comparisons import ComparedStage, Comparison, Hint
from forwardscope.results.generations import Choice, Generation, LensLayer, StepTrace, StreamEvent, TokenLogprob, Usage
from forwardscope.results.passes import AppliedEdit, Logits, Loss, Patterns, StageChange, Trace
from forwardscope.results.scores import ContinuationScore, Scores
from forwardscope.results.server import ModelInfo, ServedModel, ServiceStatus, StoredVector
from forwardscope.results.stages import Prediction, Stage, StageArrays, Token
from forwardscope.results.weights import Weight, WeightInfo

__all__ = [
    "AppliedEdit",
    "Attribution",
    "ChatAnswer",
    "ChatEvent",
    "Choice",
    "ComparedStage",
    "Comparison",
    "ContinuationScore",
    "Generation",
    "HeadShare",
    "Hint",
    "LensLayer",
    "Logits",
    "Loss",
    "ModelInfo",
    "Patterns",
    "Prediction",
    "Scores",
    "ServedModel",
    "ServiceStatus",
    "Stage",
    "StageArrays",
    "StageChange",
    "StepTrace",
    "StoredVector",
    "StreamEvent",
    "SweepCell",
    "Token",
    "TokenLogprob",
    "Trace",
    "Usage",
    "Weight",
    "WeightInfo",
]
