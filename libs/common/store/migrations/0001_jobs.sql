-- Requests (jobs), machines, credentials.

create table requests (
  id uuid primary key,
  scope text not null,                 -- where the key is unique: 'user:<user>' for callers, 'turn:<turn>' for turns
  key text not null,
  fingerprint bytea not null,          -- SHA-256 of the canonical JSON of what defines the work
  user_id text not null,
  name text not null,
  args text not null,                  -- JSON, as text: carried, not looked into
  timeout_s double precision not null,
  hinted boolean not null,             -- what the catalogue said at acceptance
  on_machine_change text not null check (on_machine_change in ('unknown', 'wait')),
  traceparent text not null default '',
  state text not null default 'queued'
    check (state in ('queued', 'processing', 'completed', 'failed', 'unknown', 'expired', 'cancelled')),
  attempts integer not null default 0, -- begin marks, and at least 1 once there is a machine's outcome
  machine text,                        -- where it was begun; never sent to another machine and journal
  journal text,
  outcome text,                        -- JSON {"result":...} or {"error":{...}}, the same bytes for every reader
  late_outcome text,                   -- what a machine said after the end; changes nothing
  accepted_at timestamptz not null default now(),
  begun_at timestamptz,
  deadline_at timestamptz not null,
  ended_at timestamptz,
  ended_by uuid,                       -- the finish that ended it; null: it ended otherwise
  check ((ended_at is not null) = (state in ('completed', 'failed', 'unknown', 'expired', 'cancelled'))),
  check ((ended_at is not null) = (outcome is not null)),
  unique (scope, key)
);
create index requests_open_by_deadline on requests (deadline_at) where ended_at is null;
create index requests_open_by_age on requests (accepted_at) where ended_at is null;
create index requests_ended on requests (ended_at) where ended_at is not null;
create index requests_of_user on requests (user_id, id desc);

-- A job as it is read, everywhere; only its machine is given its arguments. Times are milliseconds.
create view job_records as
select id, id::text as job, scope, key, fingerprint, user_id, name, timeout_s, hinted, on_machine_change, traceparent,
  state, attempts, machine, journal, outcome, ended_at,
  (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests;

-- The newest session epoch of each user: minted here, so that it grows whatever happens to Redis or its clock.
create table session_epochs (
  user_id text primary key,
  epoch bigint not null
);

create table machines (
  user_id text not null,
  machine text not null,
  name text not null,
  version text not null,
  tools text not null,                 -- JSON array, as announced
  last_epoch bigint not null,
  seen_at timestamptz not null default now(),
  primary key (user_id, machine)
);

create table api_keys (
  key_id uuid primary key,
  hash bytea not null unique,          -- SHA-256 of the value, which is shown once and stored nowhere
  name text not null,
  scopes text[] not null,
  users text[],                        -- null: every user
  created_at timestamptz not null default now(),
  revoked_at timestamptz
);

create table machine_tokens (
  token_id uuid primary key,
  user_id text not null,
  name text not null,
  created_at timestamptz not null default now(),
  expires_at timestamptz,              -- that of its newest value; null: never
  ttl_s double precision,              -- what a renewal adds; null: never expires
  revoked_at timestamptz
);
create index machine_tokens_of_user on machine_tokens (user_id, token_id desc);

-- Every value of a machine token that may still be good (see tokens.py).
create table machine_token_values (
  hash bytea primary key,
  token_id uuid not null references machine_tokens on delete cascade,
  expires_at timestamptz,              -- of this value; null: never. Revocation and the token's own end count as well
  used_at timestamptz                  -- when it first opened a session: the machine has it, or had it
);
create index machine_token_values_of_token on machine_token_values (token_id);
