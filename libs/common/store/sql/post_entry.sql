-- Post an entry with its turn and its task; see the function.
select p.verdict, p.entry_text, (p.turn).*
from towline_post_entry(%(thread)s::uuid, %(entry)s::uuid, %(turn)s::uuid, %(text)s::text, %(key)s::text,
  %(fingerprint)s::bytea, %(on_busy)s::text, %(traceparent)s::text, %(retention_s)s::float8, %(task)s::jsonb) p
