// Numbers and names as people read them. Not here: what they are of.

export const TIERS = { device: "the device", dram: "DRAM", ssd: "SSD", objects: "objects" };
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  const rounded = count * 1.0005; // 1023.9 MiB is 1.0 GiB.
  const power = count < 1 ? 0 : Math.min(Math.floor(Math.log2(rounded) / 10), BYTES.length - 1);
  const value = count / 1024 ** power;
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${BYTES[power]}`;
}

export function rate(bytesPerSecond) {
  const giga = bytesPerSecond / 1e9;
  return giga >= 0.1 ? `${giga.toFixed(giga < 10 ? 2 : 1)} GB/s` : `${(giga * 1e3).toFixed(1)} MB/s`;
}

export function milliseconds(seconds) {
  const ms = seconds * 1e3;
  if (ms >= 1e4) return `${seconds.toFixed(1)} s`;
  return `${ms >= 100 ? Math.round(ms).toLocaleString("en") : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function many(count, one, more = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
}

export function shortName(sessionId) {
  return sessionId.length > 14 ? `${sessionId.slice(0, 8)}…` : sessionId;
}
