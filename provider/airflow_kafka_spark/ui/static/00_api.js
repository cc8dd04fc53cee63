// The base of the pages: React and components of Airflow's page, requests to the API, refreshed data, and the address bar.
// All files of this folder are one script, in the order of their names: no imports, no build.

const { Component, createElement: h, Fragment, memo, useCallback, useEffect, useMemo, useRef, useState } = globalThis.React;
const { Link, useSearchParams } = globalThis.ReactRouterDOM;
const C = globalThis.ChakraUI;

const API = "kafka-spark/api/";
const FRESH_MS = 3000;
const AFTER_ERROR_MS = 10000;

// An error of the API: what was found, what was expected, what to do.
class ApiError extends Error {
  constructor(status, detail) {
    const words = typeof detail === "string" ? { message: detail } : detail && typeof detail === "object" && !Array.isArray(detail) ? detail : {};
    super(words.message || `The server answered ${status}.`);
    Object.assign(this, { status, found: words.found, expected: words.expected, action: words.action });
  }
}

// The address of a route of the API. It is relative to <base>, and so contains the path of Airflow's base URL once.
function apiUrl(path, query = {}) {
  const url = new URL(API + path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url.href;
}

async function ask(url, body) {
  const options = { credentials: "same-origin", headers: { Accept: "application/json" } };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(url, options);
  } catch {
    throw new ApiError(0, { message: "Airflow does not answer.", action: "Check that the API server runs, and the network." });
  }
  const text = await answer.text();
  if (answer.ok) return text;
  let detail = null;
  try {
    detail = JSON.parse(text).detail;
  } catch {
    // The page of a proxy, or an empty response: only the status is known.
  }
  throw new ApiError(answer.status, detail);
}

const get = async (path, query) => JSON.parse(await ask(apiUrl(path, query)));
const post = async (path, body) => JSON.parse(await ask(apiUrl(path), body));

// Data that is requested again every few seconds while the tab is visible. The last data stays until newer data arrives,
// and stays after an error. An unchanged response renders nothing.
function useLive(path, query, every = FRESH_MS) {
  const url = path === null ? null : apiUrl(path, query);
  const [state, setState] = useState({ url: null, data: null, error: null, at: 0 });
  const refresh = useRef(() => {});
  useEffect(() => {
    if (url === null) return undefined;
    let over = false;
    let timer = 0;
    let busy = false;
    let last = null;
    async function round() {
      clearTimeout(timer);
      if (busy || over) return;
      busy = true;
      let wait = every;
      try {
        const text = await ask(url);
        if (!over && text !== last) {
          last = text;
          setState({ url, data: JSON.parse(text), error: null, at: Date.now() });
        } else if (!over) {
          setState((was) => (was.error ? { ...was, error: null, at: Date.now() } : was));
        }
      } catch (error) {
        wait = AFTER_ERROR_MS;
        if (!over) setState((was) => ({ ...was, url, data: was.url === url ? was.data : null, error }));
      }
      busy = false;
      if (!over && !document.hidden) timer = setTimeout(round, wait);
    }
    const shown = () => {
      if (!document.hidden) round();
    };
    document.addEventListener("visibilitychange", shown);
    refresh.current = round;
    round();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [url, every]);
  return { ...state, stale: state.url !== url, refresh: () => refresh.current() };
}

// Data that is requested once, and again on demand.
function useAsked(question) {
  const [state, setState] = useState({ data: null, error: null, busy: false });
  const turn = useRef(0);
  const go = useCallback(
    async (...args) => {
      const mine = ++turn.current;
      setState((was) => ({ ...was, busy: true }));
      try {
        const data = await question(...args);
        if (turn.current === mine) setState({ data, error: null, busy: false });
        return data;
      } catch (error) {
        if (turn.current === mine) setState({ data: null, error, busy: false });
        return null;
      }
    },
    [question],
  );
  const clear = useCallback(() => {
    turn.current++;
    setState({ data: null, error: null, busy: false });
  }, []);
  return { ...state, go, clear };
}

// The query of the address bar, so that a link and a reload show the same page.
function useQuery() {
  const [params, setParams] = useSearchParams();
  const set = useCallback(
    (changes, { replace = true } = {}) =>
      setParams(
        (was) => {
          const now = new URLSearchParams(was);
          for (const [name, value] of Object.entries(changes)) {
            if (value === null || value === undefined || value === "") now.delete(name);
            else now.set(name, String(value));
          }
          return now;
        },
        { replace },
      ),
    [setParams],
  );
  return [params, set];
}

function searchOf(values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) if (value !== null && value !== undefined && value !== "") query.set(name, value);
  return `?${query}`;
}

function useDelayed(value, milliseconds) {
  const [late, setLate] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setLate(value), milliseconds);
    return () => clearTimeout(timer);
  }, [value, milliseconds]);
  return late;
}

// One clock for all "12 s ago" of the page.
const clock = { listeners: new Set(), timer: 0 };
function useNow() {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const tick = () => setNow(Date.now());
    clock.listeners.add(tick);
    if (!clock.timer) clock.timer = setInterval(() => document.hidden || clock.listeners.forEach((each) => each()), 1000);
    return () => {
      clock.listeners.delete(tick);
      if (!clock.listeners.size) clock.timer = clearInterval(clock.timer) || 0;
    };
  }, []);
  return now;
}
