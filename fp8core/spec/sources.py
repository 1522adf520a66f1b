"""Where a job's model, tokenizer and data come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from fp8core.spec.parts import (
    ColumnName,
    Count,
    HubId,
    Part,
    PathText,
    Revision,
    Seed,
    one_message,
)
from fp8core.spec.sizes import LARGEST_SIZES, MOST_WEIGHTS, size_schema

JOB_ID_PATTERN = r"^job_[0-9A-Za-z]+$"
UPLOAD_ID_PATTERN = r"^[A-Za-z0-9._-]+$"
SHA256_PATTERN = r"^[0-9a-f]+$"
SPLIT_PATTERN = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$"

JobId = Annotated[str, Field(max_length=64, pattern=JOB_ID_PATTERN)]
Sha256 = Annotated[str, Field(min_length=64, max_length=64, pattern=SHA256_PATTERN)]
LARGEST_VOCABULARY = 1_000_000


class HuggingFaceModel(Part, title="Hugging Face model"):
    """A model of the Hugging Face hub, or of the node's local hub cache."""

    source: Literal["huggingface"] = Field(description="The model is named by a hub id.")
    id: HubId = Field(description="Hub id, `owner/name` or `name`.")
    revision: Revision | None = Field(
        default=None, description="Branch, tag or commit; the hub's default branch if null."
    )


class PathModel(Part, title="Checkpoint folder"):
    """A Hugging Face checkpoint folder: config.json and safetensors."""

    source: Literal["path"] = Field(description="The model is a checkpoint folder.")
    path: PathText = Field(
        description="Folder with config.json and safetensors, below an allowed root."
    )


class ConfigModel(Part, title="New model from a configuration"):
    """Random weights from a Hugging Face configuration."""

    source: Literal["config"] = Field(
        description="The model is built from a configuration, with random weights."
    )
    config: dict[str, JsonValue] = Field(
        description=(
            "Hugging Face configuration; `model_type` is required. Its sizes are bounded: "
            f"`num_hidden_layers` by {LARGEST_SIZES['num_hidden_layers']}, `hidden_size` by "
            f"{LARGEST_SIZES['hidden_size']}, `intermediate_size` by "
            f"{LARGEST_SIZES['intermediate_size']}, heads and `head_dim` by "
            f"{LARGEST_SIZES['head_dim']}, `vocab_size` by {LARGEST_SIZES['vocab_size']}, "
            f"`max_position_embeddings` by {LARGEST_SIZES['max_position_embeddings']}; all weights "
            f"together by {MOST_WEIGHTS}."
        ),
        json_schema_extra={"properties": size_schema()},
    )


class JobModel(Part, title="Result of another job"):
    """A checkpoint that another job made."""

    source: Literal["job"] = Field(description="The model is the result of another job.")
    job: JobId = Field(description="Id of the job.")
    checkpoint: Annotated[
        Literal["model", "best", "last"] | Annotated[int, Field(ge=0, le=2**31 - 1)],
        one_message('must be "model", "best", "last" or the step number of a checkpoint'),
    ] = Field(
        default="model",
        description="`model` (the exported model), `best`, `last`, or the step of a checkpoint.",
    )


ModelReference = Annotated[
    HuggingFaceModel | PathModel | ConfigModel | JobModel, Field(discriminator="source")
]


class ModelTokenizer(Part, title="The model's tokenizer"):
    """The tokenizer that belongs to the model."""

    source: Literal["model"] = Field(
        default="model", description="The tokenizer saved beside the model."
    )


class HuggingFaceTokenizer(Part, title="Hugging Face tokenizer"):
    """A tokenizer of the Hugging Face hub."""

    source: Literal["huggingface"] = Field(description="The tokenizer is named by a hub id.")
    id: HubId = Field(description="Hub id, `owner/name` or `name`.")
    revision: Revision | None = Field(
        default=None, description="Branch, tag or commit; the hub's default branch if null."
    )


class PathTokenizer(Part, title="Tokenizer folder"):
    """A tokenizer saved in a folder."""

    source: Literal["path"] = Field(description="The tokenizer is a folder.")
    path: PathText = Field(description="Folder with tokenizer.json, below an allowed root.")


class BytesTokenizer(Part, title="Bytes"):
    """Each UTF-8 byte is one token."""

    source: Literal["bytes"] = Field(
        default="bytes", description="Each UTF-8 byte of the text is one token."
    )


class TrainTokenizer(Part, title="New tokenizer"):
    """A byte-level BPE learned from the training split and saved with the model."""

    source: Literal["train"] = Field(description="A BPE is learned from the training split.")
    vocab_size: int = Field(
        default=4096,
        ge=260,
        le=LARGEST_VOCABULARY,
        description="Tokens to learn, the 256 bytes and the special tokens included.",
    )


Tokenizer = Annotated[
    ModelTokenizer | HuggingFaceTokenizer | PathTokenizer | BytesTokenizer | TrainTokenizer,
    Field(discriminator="source"),
]


class Columns(Part):
    """Names of the fields of a record, by role. Only those that `format` reads may be set."""

    text: ColumnName = Field(
        default="text", description="The text, for the formats `text` and `labelled`."
    )
    prompt: ColumnName = Field(
        default="prompt", description="The prompt, for the format `prompt_completion`."
    )
    completion: ColumnName = Field(
        default="completion", description="The completion, for the format `prompt_completion`."
    )
    messages: ColumnName = Field(
        default="messages", description="The list of messages, for the format `chat`."
    )
    label: ColumnName = Field(default="label", description="The class, for the format `labelled`.")


def _packing_default(validated: dict[str, Any]) -> bool:
    return bool(validated.get("format") != "labelled")


class DataPart(Part):
    """What every data source has."""

    source: str = Field(description="Where the data comes from.")
    format: Literal["text", "prompt_completion", "chat", "labelled"] = Field(
        default="text",
        description=(
            "Shape of a record: `text`; `prompt_completion` (loss on the completion only); `chat` "
            "(messages through the tokenizer's template, loss on the assistant's tokens only); "
            "`labelled` (a text and its class)."
        ),
    )
    columns: Columns = Field(
        default_factory=Columns, description="Names of the fields of a record, by role."
    )
    labels: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(min_length=2, max_length=10_000),
        ]
        | None
    ) = Field(
        default=None,
        description=(
            "The classes in order, for the format `labelled`. Null: those of the training split, "
            "sorted."
        ),
    )
    shuffle: bool = Field(default=True, description="Shuffle the training documents.")
    shuffle_seed: Seed = Field(default=0, description="Seed of the order of documents.")
    epochs: Count | None = Field(
        default=None,
        description=(
            "Passes over the data after which training ends even before `training.steps`. Null: "
            "repeat until `training.steps`."
        ),
    )
    packing: bool = Field(
        default_factory=_packing_default,
        description=(
            "Fill each sequence with several documents, positions and attention reset between "
            "them. On by default, except for the format `labelled`, which never packs."
        ),
        json_schema_extra={"default": True},
    )
    append_end_of_text: bool = Field(
        default=True, description="Append the end-of-text token to each document."
    )


class TextData(DataPart, title="Text files"):
    """Plain text: one file, or a folder of .txt files."""

    source: Literal["text"] = Field(description="Plain UTF-8 text files.")
    path: PathText = Field(description="A file, or a folder of .txt files, below an allowed root.")
    document_separator: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description=(
            "The line that separates documents of a file; with a line feed in it, the exact text "
            "that does. Null: each file is one document."
        ),
    )


class JsonlData(DataPart, title="JSON Lines file"):
    """JSON Lines: one record a line."""

    source: Literal["jsonl"] = Field(description="A JSON Lines file, one object a line.")
    path: PathText = Field(description="The .jsonl file, below an allowed root.")


class ParquetData(DataPart, title="Parquet file"):
    """An Apache Parquet file."""

    source: Literal["parquet"] = Field(description="An Apache Parquet file.")
    path: PathText = Field(description="The .parquet file, below an allowed root.")


class HuggingFaceData(DataPart, title="Hugging Face data set"):
    """A data set of the Hugging Face hub, or of the node's local cache."""

    source: Literal["huggingface"] = Field(description="A data set named by its hub id.")
    id: HubId = Field(description="Hub id, `owner/name` or `name`.")
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, description="Name of the data set's configuration, where it has several."
    )
    revision: Revision | None = Field(
        default=None, description="Branch, tag or commit; the hub's default branch if null."
    )
    split: str = Field(
        default="train",
        max_length=200,
        pattern=SPLIT_PATTERN,
        description="The split to train on.",
    )


class UploadData(DataPart, title="Uploaded data set"):
    """A data set uploaded to the service."""

    source: Literal["upload"] = Field(description="A data set uploaded to the service.")
    dataset: str = Field(
        min_length=1,
        max_length=200,
        pattern=UPLOAD_ID_PATTERN,
        description="Id of the uploaded data set.",
    )
    sha256: Sha256 | None = Field(
        default=None,
        description="Digest of the data set's file. Null: filled in when the job is taken.",
    )


class BuiltinData(DataPart, title="Built-in text"):
    """Text that every Python installation carries; needs no file and no network."""

    source: Literal["builtin"] = Field(description="Text that comes with Python itself.")
    name: Literal["python_topics"] = Field(
        default="python_topics",
        description="`python_topics`: the help topics of the Python language, in English.",
    )


DataSource = Annotated[
    TextData | JsonlData | ParquetData | HuggingFaceData | UploadData | BuiltinData,
    Field(discriminator="source"),
]
