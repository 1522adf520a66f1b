"""What all tables share."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Double, Integer, MetaData, Sequence, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Names every constraint by rule, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    # Values that the database made (its clock's, above all) are read back with the statement.
    __mapper_args__ = {"eager_defaults": True}  # noqa: RUF012
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy
        str: Text,
        datetime: DateTime(timezone=True),
        float: Double,
        Json: JSONB,
        list[str]: ARRAY(Text),
        list[int]: ARRAY(Integer),
    }


fencing_tokens = Sequence("fencing_tokens", data_type=BigInteger, metadata=Base.metadata)
