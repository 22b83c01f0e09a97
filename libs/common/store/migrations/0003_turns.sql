-- Agents, threads, entries, turns, usage. A turn is a task of Absurd's queue `turns`, whose schema `migrate` puts in
-- place before this file.
--
-- Whoever locks several rows takes them in one order: thread, turn, Absurd's run, Absurd's task.

create table agents (
  agent text primary key,
  kind text not null check (kind in ('echo', 'http', 'openai')),
  url text,
  model text,
  instructions text,
  tools text[],                        -- which of the machine's tools it is offered; null: all of them
  api_key bytea,                       -- both encrypted; written, never shown
  signing_secret bytea,
  turn_cap_s double precision not null,
  created_at timestamptz not null default date_trunc('milliseconds', now())
);

create table threads (
  thread uuid primary key,
  agent text not null,                 -- may be deleted: the thread can be read, and nothing more is answered
  user_id text,
  model text,                          -- instead of the agent's
  next_position bigint not null default 1,
  created_at timestamptz not null default date_trunc('milliseconds', clock_timestamp()),
  used_at timestamptz not null default clock_timestamp()
);
create index threads_of_user on threads (user_id, thread desc);
create index threads_used on threads (used_at);

create table entries (
  entry uuid primary key,
  thread uuid not null references threads on delete cascade,
  position bigint not null,
  role text not null check (role in ('user', 'agent')),
  text text not null,
  turn uuid not null,                  -- the turn that answers it, or that wrote it
  created_at timestamptz not null default date_trunc('milliseconds', clock_timestamp()),
  unique (thread, position)
);

create table turns (
  turn uuid primary key,
  thread uuid not null references threads on delete cascade,
  number bigint not null,              -- position of the entry that it answers: turns of a thread run in this order
  entry uuid not null unique,
  key text,                            -- null: its time is over, and the key is new
  fingerprint bytea not null,
  traceparent text not null default '',
  cap_s double precision not null,     -- its agent's, when the entry was posted
  state text not null default 'queued' check (state in ('queued', 'running', 'completed', 'failed', 'cancelled')),
  attempts integer not null default 0,
  replays integer not null default 0,  -- how often its key was submitted again
  task uuid unique,                    -- Absurd's; null while turns before it are open
  cancel_requested_at timestamptz,
  reply uuid unique,                   -- the agent's entry
  error_code text,
  error_message text,
  created_at timestamptz not null default date_trunc('milliseconds', clock_timestamp()),
  started_at timestamptz,
  ended_at timestamptz,
  ended_by uuid,                       -- the attempt that ended it, or the call
  announced_at timestamptz,            -- its end is in the thread's log
  unique (thread, number),
  unique (thread, key),
  -- One terminal, a constraint and not a hope.
  check ((ended_at is not null) = (state in ('completed', 'failed', 'cancelled'))),
  check ((reply is not null) = (state = 'completed')),
  check ((error_code is not null) = (state in ('failed', 'cancelled')))
);
-- One turn of a thread at a time.
create unique index turns_under_way on turns (thread) where task is not null and ended_at is null;
create index turns_open on turns (turn) where ended_at is null;
create index turns_unannounced on turns (ended_at) where ended_at is not null and announced_at is null;

create table usage_events (
  turn uuid not null,                  -- no reference: usage outlives its thread
  seam text not null,
  thread uuid not null,
  agent text not null,
  user_id text,
  model text,
  input_tokens bigint not null,
  output_tokens bigint not null,
  model_calls integer not null,
  tool_calls integer not null,
  seconds double precision not null,
  at timestamptz not null default date_trunc('milliseconds', clock_timestamp()),
  primary key (turn, seam)
);
create index usage_events_at on usage_events (at desc, turn desc);
create index usage_events_of_thread on usage_events (thread, at desc);
create index usage_events_of_agent on usage_events (agent, at desc);

-- A turn as it is read, everywhere. Times are milliseconds.
create view turn_records as
select t.turn, t.thread, t.number, t.entry, t.key, t.fingerprint, t.traceparent, t.cap_s, t.state, t.attempts, t.replays,
  t.cancel_requested_at is not null as cancel_requested,
  t.reply, r.text as reply_text, r.position as reply_position, t.error_code, t.error_message,
  h.agent, h.user_id, h.model,
  (extract(epoch from t.created_at) * 1000)::bigint as created_ms,
  (extract(epoch from t.started_at) * 1000)::bigint as started_ms,
  (extract(epoch from t.ended_at) * 1000)::bigint as ended_ms
from turns t join threads h using (thread) left join entries r on r.entry = t.reply;

select absurd.create_queue('turns');
-- Each claim looks among the tasks that are open for those over their limit; ended ones are kept for days.
create index towline_open_tasks on absurd.t_turns (task_id) where state in ('pending', 'sleeping', 'running');

-- Whoever waits for work is told at commit: a task was spawned, or an attempt is to be repeated.
create function towline_tell_of_turns() returns trigger language plpgsql as $$
begin
  perform pg_notify('towline_turns', '');
  return null;
end
$$;
create trigger towline_tell after insert on absurd.r_turns for each statement execute function towline_tell_of_turns();
