"""`POST /v1/rerank`, in the form that Cohere, Jina and vLLM share."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from api.schemas.base import RequestBody
from api.schemas.embeddings import NUM_INPUTS_MAX, ModelName, Text


class Document(RequestBody):
    """A document as an object."""

    text: Text


def document_branch(document: Any) -> str:
    """Which of the two forms of a document this is."""
    return "<object>" if isinstance(document, dict | Document) else "<text>"


class RerankBody(RequestBody):
    """The body of `POST /v1/rerank`."""

    model: ModelName = Field(examples=["BAAI/bge-reranker-v2-m3"])
    query: Text = Field(examples=["What goes first?"])
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("<text>")] | Annotated[Document, Tag("<object>")],
                Discriminator(document_branch),
            ]
        ],
        Field(
            min_length=1,
            max_length=NUM_INPUTS_MAX,
            examples=[["Prefills go first.", "Decodes ride along."]],
        ),
    ]
    top_n: int | None = Field(default=None, ge=1)
    """So many of the best; all where it is not said."""
    return_documents: bool = False
    truncate: bool = False
    """Cut a document that is too long at its end, where it would be refused otherwise."""

    @property
    def texts(self) -> list[str]:
        """Each document's text."""
        return [each if isinstance(each, str) else each.text for each in self.documents]
